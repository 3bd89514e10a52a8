import copy
from contextlib import contextmanager

import pytest
import torch
from tiny_policies import ARCHITECTURE_NAMES, add_random_adapter, fill_adapter, plain_scores, random_policy, token_ids
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM, GenerationConfig, Lfm2Config

from llm_policy import decoding, prompt_cache, sampling
from llm_policy.chat import prompt_token_ids
from llm_policy.models import EMBEDDED_MODEL, load_model, load_tokenizer
from llm_policy.sampling import sample_completions

GROUP = 3
# Ragged, so that all but one are padded on the left; two are longer than gemma3's window of 16, one is one token over
# what the prefill needs.
PROMPTS = [token_ids(length, seed=length) for length in (40, 23, 9, 2)]


def generation(**options) -> GenerationConfig:
    """Free sampling of 8 tokens that nothing but the length ends."""
    defaults = {"max_new_tokens": 8, "do_sample": True, "top_k": 0, "pad_token_id": 0, "eos_token_id": 399}
    return GenerationConfig(**(defaults | options), disable_compile=True)


GREEDY = {"do_sample": False, "top_k": None}


def generated_alone(model, prompt: list[int], config: GenerationConfig) -> list[int]:
    return model.generate(torch.tensor([prompt]), generation_config=config)[0, len(prompt) :].tolist()


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_greedy_equals_generate_on_each_prompt_alone(architecture):
    model = random_policy(architecture)
    config = generation(**GREEDY, max_new_tokens=24)  # beyond the window, within the completion too
    alone = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    assert len({tuple(completion) for completion in alone}) == len(PROMPTS)  # the model does look at its prompt
    assert sample_completions(model, PROMPTS, config, GROUP) == [c for c in alone for _ in range(GROUP)]


@pytest.mark.skipif(not EMBEDDED_MODEL.is_dir(), reason="make model")
def test_greedy_equals_generate_on_the_embedded_model():
    """Free text; the second best token is far enough away that no rounding decides."""
    model, tokenizer = load_model(str(EMBEDDED_MODEL), "float32"), load_tokenizer(str(EMBEDDED_MODEL))
    asked = ["What is a lake?", "Name three colours of the sky.", "Which way is north, if the sun rises behind me?"]
    prompts = [prompt_token_ids([{"role": "user", "content": text}], tokenizer) for text in asked]
    config = generation(**GREEDY, max_new_tokens=32)
    alone = [generated_alone(model, prompt, config) for prompt in prompts]
    for prompt, completion in zip(prompts, alone, strict=True):
        logits_TV = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
        best_T2 = logits_TV.topk(2).values
        assert (best_T2[:, 0] - best_T2[:, 1]).min() > 1e-3
    assert sample_completions(model, prompts, config, GROUP) == [c for c in alone for _ in range(GROUP)]


@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_a_shared_prefix_changes_no_token(architecture):
    model, config = random_policy(architecture), generation(**GREEDY)
    prompts = [token_ids(20) + ending for ending in PROMPTS] + [token_ids(20)]
    alone = [generated_alone(model, prompt, config) for prompt in prompts]
    assert sample_completions(model, prompts, config, GROUP) == [c for c in alone for _ in range(GROUP)]


def test_a_recurrent_model_samples_as_generate_does():
    """It has no keys and values that could be repeated for a group."""
    torch.manual_seed(0)
    config = Lfm2Config(
        vocab_size=400, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False,
    )  # fmt: skip
    model, greedy = AutoModelForCausalLM.from_config(config).eval(), generation(**GREEDY)
    prompts = [token_ids(20) + ending for ending in PROMPTS[:2]]
    alone = [generated_alone(model, prompt, greedy) for prompt in prompts]
    assert sample_completions(model, prompts, greedy, GROUP) == [c for c in alone for _ in range(GROUP)]


def test_a_shared_prefix_is_prefilled_once():
    model = random_policy("llama")
    shapes = []
    handle = model.base_model.register_forward_hook(
        lambda _module, _arguments, options, output: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    sample_completions(model, [token_ids(20) + ending for ending in PROMPTS], generation(max_new_tokens=2), GROUP)
    handle.remove()
    assert shapes[:3] == [(1, 20), (4, 39), (4, 1)]  # and as many rows as there are different completions


@pytest.mark.parametrize("rows_per_batch", [1, GROUP, 2 * GROUP + 1, 100])
def test_the_batch_size_changes_nothing(rows_per_batch):
    model, config = random_policy("llama"), generation(**GREEDY)
    expected = [generated_alone(model, prompt, config) for prompt in PROMPTS for _ in range(GROUP)]
    assert sample_completions(model, PROMPTS, config, GROUP, rows_per_batch) == expected


@pytest.mark.parametrize("rows_per_batch", [1, GROUP, 2 * GROUP + 1])
def test_each_batch_has_random_numbers_of_its_own(rows_per_batch):
    def drawn(rows: int) -> list[list[int]]:
        torch.manual_seed(0)
        return sample_completions(random_policy("llama"), PROMPTS, generation(), GROUP, rows)

    assert drawn(rows_per_batch) == drawn(100)


def test_no_more_rows_than_asked_for_are_decoded_at_once():
    model = random_policy("llama")
    shapes = model_passes(model)
    assert len(sample_completions(model, PROMPTS[:1], generation(), 10, rows_per_batch=4)) == 10
    assert max(shape[0] for shape in shapes) == 4


def test_an_end_token_ends_its_completion_and_stays_in_it():
    model = random_policy("llama")
    free = [generated_alone(model, prompt, generation(**GREEDY)) for prompt in PROMPTS]
    ends = [free[0][2], free[1][0]]
    found = sample_completions(model, PROMPTS, generation(**GREEDY, eos_token_id=ends))
    for completion, whole in zip(found, free, strict=True):
        first = next((i for i, token in enumerate(whole) if token in ends), len(whole) - 1)
        assert completion == whole[: first + 1]
    assert [len(completion) for completion in found][:2] == [3, 1]
    single = sample_completions(model, PROMPTS, generation(**GREEDY, eos_token_id=ends[0]))  # an int, not a list
    assert single[0] == free[0][:3]


def test_decoding_stops_when_all_rows_have_ended():
    model = random_policy("llama")
    free = [generated_alone(model, prompt, generation(**GREEDY)) for prompt in PROMPTS]
    passes = []
    handle = model.register_forward_hook(lambda *_: passes.append(1))  # the prefill runs the backbone alone
    ends = [completion[1] for completion in free]
    found = sample_completions(model, PROMPTS, generation(**GREEDY, eos_token_id=ends, max_new_tokens=100), GROUP)
    handle.remove()
    assert len(passes) == max(map(len, found)) <= 2


def test_each_prompt_is_prefilled_once():
    model = random_policy("llama")
    shapes = []
    handle = model.base_model.register_forward_hook(
        lambda _module, _arguments, options, output: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    sample_completions(model, PROMPTS, generation(max_new_tokens=2), GROUP)
    handle.remove()
    assert shapes[:2] == [(4, 39), (4, 1)]  # the last token, too


@pytest.mark.parametrize("guess", [None, (), (7,), (399, 3)])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@torch.no_grad()
def test_first_tokens_follow_the_softmax(temperature, guess):
    """Chi-square; tokens that are expected fewer than five times share a cell."""
    model, samples = random_policy("llama"), 4000
    torch.manual_seed(0)
    config = generation(max_new_tokens=1, temperature=temperature)
    guesses = None if guess is None else [list(guess)] * 2
    drawn = sample_completions(model, PROMPTS[:2], config, samples, rows_per_batch=samples, guesses=guesses)
    for i, prompt in enumerate(PROMPTS[:2]):
        probabilities_V = (model(torch.tensor([prompt])).logits[0, -1] / temperature).softmax(-1)
        tokens = torch.tensor(drawn[i * samples : (i + 1) * samples])[:, 0]
        counts_V = tokens.bincount(minlength=len(probabilities_V)).double()
        expected_V = samples * probabilities_V.double()
        rare_V = expected_V < 5

        def cells(values_V, rare_V=rare_V):
            return torch.cat([values_V[~rare_V], values_V[rare_V].sum()[None]])

        statistic = ((cells(counts_V) - cells(expected_V)) ** 2 / cells(expected_V)).sum()
        freedom = torch.tensor(len(cells(counts_V)) - 1.0, dtype=torch.double)
        assert freedom > 20
        p_value = torch.special.gammaincc(freedom / 2, statistic / 2).item()
        assert p_value > 0.001
        # The test can fail: the same counts against the softmax of another temperature.
        flatter_V = samples * (model(torch.tensor([prompt])).logits[0, -1] / temperature / 1.5).softmax(-1).double()
        other = ((cells(counts_V) - cells(flatter_V)) ** 2 / cells(flatter_V)).sum()
        assert torch.special.gammaincc(freedom / 2, other / 2).item() < 1e-6


@pytest.mark.parametrize(("architecture", "guess"), [("gemma3", None), ("llama", None), ("llama", 2), ("llama", 4)])
@torch.no_grad()
def test_later_tokens_follow_their_own_prefix(architecture, guess):
    """Mean log-probability of the samples against its exact expectation, minus the entropies: within 4 errors."""
    model, samples, config = random_policy(architecture), 300, generation(max_new_tokens=4)
    torch.manual_seed(0)
    guesses = guess and [generated_alone(model, PROMPTS[1], generation(**GREEDY))[:guess]]
    drawn = sample_completions(model, PROMPTS[1:2], config, samples, rows_per_batch=samples, guesses=guesses)
    scores_ST2 = torch.stack([torch.stack(plain_scores(model, PROMPTS[1], c), dim=1) for c in drawn])
    surprise_ST = scores_ST2[..., 0] + scores_ST2[..., 1]  # log p + entropy: mean 0 at every position
    standard_errors_T = surprise_ST.std(0) / samples**0.5
    assert (surprise_ST.mean(0).abs() < 4 * standard_errors_T).all()


# Models whose attention cannot be exchanged ---------------------------------------------------------------------


@pytest.mark.parametrize("guess", [None, "right"])
@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model, "is_quantized", True),
        lambda model: setattr(model.config, "model_type", "gpt_oss"),
    ],
    ids=["quantised", "not tried"],
)
def test_other_models_decode_with_generate_and_say_so(capsys, change, guess):
    prompt_cache._say_once.cache_clear()
    model, config = random_policy("llama"), generation(**GREEDY)
    expected = sample_completions(model, PROMPTS, config, GROUP)
    assert capsys.readouterr().out == ""
    change(model)
    shapes = model_passes(model)
    for _ in range(2):
        guesses = guess and expected[::GROUP]
        assert sample_completions(model, PROMPTS, config, GROUP, guesses=guesses) == expected
    assert capsys.readouterr().out.count("decodes with a copy of its prompt") == 1
    assert {rows for rows, _ in shapes} == {len(PROMPTS) * GROUP}


@pytest.mark.parametrize("architecture", prompt_cache.TRIED)
def test_architectures_that_share_their_prompts(architecture):
    if architecture == "gemma3_text":
        model = random_policy("gemma3")
    else:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
        tokens = {"vocab_size": 400, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 399}
        slides = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}
        own = {"mistral": slides, "qwen2": slides, "qwen3": {"head_dim": 8}, "gemma": {"head_dim": 8}}
        config = AutoConfig.for_model(
            architecture, num_key_value_heads=2, initializer_range=0.3, **sizes, **tokens, **own.get(architecture, {})
        )
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config).eval()
    prompt_cache._say_once.cache_clear()
    config = generation(**GREEDY, max_new_tokens=16)
    expected = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    assert len({tuple(completion) for completion in expected}) == len(PROMPTS)
    shapes = model_passes(model)
    assert sample_completions(model, PROMPTS, config, GROUP) == [c for c in expected for _ in range(GROUP)]
    assert max(rows for rows, _ in shapes) == len(PROMPTS)  # equal completions share a row


def test_rows_that_have_ended_and_prompts_without_rows_leave_the_batch():
    model = random_policy("llama")
    free = [generated_alone(model, prompt, generation(**GREEDY)) for prompt in PROMPTS]
    config = generation(**GREEDY, eos_token_id=[free[0][1], free[1][3], free[2][5]])
    expected = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    shapes = model_passes(model)
    assert sample_completions(model, PROMPTS, config) == expected
    lengths = [len(completion) for completion in expected]
    assert len(set(lengths)) > 2
    assert shapes == [(sum(length > i for length in lengths), 1) for i in range(max(lengths))]


def test_no_copy_of_a_prompt_per_completion(monkeypatch):
    """The keys that a pass reads: those of the prompts once, and of each completion its own."""
    model, seen = random_policy("llama"), []

    def counted(module, query, key, value, *arguments, behind, **options):
        seen.append((behind.layers[0].prompt_keys_PHLD.shape[::2], key.shape[::2], key.untyped_storage().nbytes()))
        return prompt_cache.attention_behind_prompts(module, query, key, value, *arguments, behind=behind, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, prompt_cache.ATTENTION, counted)
    torch.manual_seed(0)
    sample_completions(model, PROMPTS, generation(), GROUP)
    assert {prompts for prompts, _, _ in seen} == {(4, 39)}  # all but the last token of the longest
    assert seen[-1][1] == (12, prompt_cache.PLACES)  # the 8 of each completion, and room for more
    assert len({size for _, (rows, _), size in seen if rows == 12}) == 1  # written in place into room for all


def test_completions_are_at_least_as_long_as_asked():
    model = random_policy("llama")
    first = {generated_alone(model, prompt, generation(**GREEDY))[0] for prompt in PROMPTS}
    config = generation(**GREEDY, eos_token_id=sorted(first), min_new_tokens=5)
    expected = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    assert min(map(len, expected)) >= 5
    assert sample_completions(model, PROMPTS, config) == expected
    guesses = [completion[:3] for completion in expected]
    assert sample_completions(model, PROMPTS, config, guesses=guesses) == expected


# In fixed places -----------------------------------------------------------------------------------------------

CUTS = {"free": (0, 0, 0, 0), "several lengths": (20, 5, 0, 12), "two prompts left": (39, 39, 0, 1)}


@pytest.fixture
def fixed(monkeypatch) -> list[list[int]]:
    """Decode as on CUDA from now on, step by step; tokens of each row when that began, one list per batch."""
    begun = []

    class Noted(decoding.FixedDecoding):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            begun.append(self.counts)

    monkeypatch.setattr(decoding, "DEVICES", {"cpu"})
    monkeypatch.setattr(sampling, "FixedDecoding", Noted)
    return begun


@pytest.mark.parametrize("cuts", CUTS.values(), ids=CUTS)
@pytest.mark.parametrize("options", [{}, GREEDY, {"min_new_tokens": 25}], ids=["sampled", "greedy", "at least"])
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_fixed_places_change_no_token(architecture, options, cuts, fixed, monkeypatch):
    """Rows that begin at several lengths and end at different times."""
    ends = [] if cuts == CUTS["two prompts left"] else range(1, 10)
    model, config = random_policy(architecture), generation(max_new_tokens=40, eos_token_id=[391, *ends], **options)
    noise_RT = torch.rand(len(PROMPTS) * GROUP, 40, generator=torch.Generator().manual_seed(1))

    def draw(guesses):
        return sample_completions(model, PROMPTS, config, GROUP, guesses=guesses, noise_RT=noise_RT)

    with monkeypatch.context() as usual:
        usual.setattr(decoding, "DEVICES", {})
        expected = draw(None)
    if ends and config.do_sample:
        assert len({len(completion) for completion in expected}) > 2
    assert draw([expected[i * GROUP][:cut] for i, cut in enumerate(cuts)]) == expected
    ((*counts,),) = fixed
    if not config.do_sample:
        assert (len(set(counts)) > 1) == any(cuts)


def test_fixed_places_end_when_all_rows_have_ended(fixed):
    model = random_policy("llama")
    alone = [generated_alone(model, prompt, generation(**GREEDY)) for prompt in PROMPTS]
    shapes = model_passes(model)
    for last, passes in ((1, 2), (7, decoding.BETWEEN_LOOKS)):
        ends = sorted({completion[last] for completion in alone})
        config = generation(**GREEDY, eos_token_id=ends, max_new_tokens=100)
        shapes.clear()
        found = sample_completions(model, PROMPTS, config)
        assert shapes == [(4, 1)] * passes
        assert found == [generated_alone(model, prompt, config) for prompt in PROMPTS]


def test_a_few_tokens_are_decoded_as_usual(fixed):
    few = decoding.AT_FIRST + decoding.FEWEST - 1
    sample_completions(random_policy("llama"), PROMPTS, generation(max_new_tokens=few))
    assert not fixed


def test_a_recording_that_fails_is_said_and_not_tried_again(capsys, monkeypatch):
    @contextmanager
    def graph(*_arguments, **_options):
        try:
            yield
        finally:
            raise RuntimeError("operation failed due to a previous error during capture")

    def step():
        raise RuntimeError("operation not permitted when stream is capturing\nCompile with ...")

    streams = []
    monkeypatch.setattr(decoding, "DEVICES", {"cuda"})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: "usual")
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)
    assert decoding.recorded(step) is step
    assert streams == ["usual"]
    assert not decoding.is_worth_recording(torch.device("cuda"), 100)
    said = "decoding without a CUDA graph, which is slower: operation not permitted when stream is capturing\n"
    assert capsys.readouterr().out == said


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("options", [{}, GREEDY, {"min_new_tokens": 25}], ids=["sampled", "greedy", "at least"])
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_a_recorded_pass_changes_no_token_on_a_gpu(architecture, options, monkeypatch):
    model = random_policy(architecture).cuda()
    config = generation(max_new_tokens=40, eos_token_id=[391, *range(1, 10)], **options)
    noise_RT = torch.rand(len(PROMPTS) * GROUP, 40, generator=torch.Generator().manual_seed(1))
    found = sample_completions(model, PROMPTS, config, GROUP, noise_RT=noise_RT)
    assert "cuda" in decoding.DEVICES  # the recording has not failed
    monkeypatch.setattr(decoding, "DEVICES", {})
    assert sample_completions(model, PROMPTS, config, GROUP, noise_RT=noise_RT) == found


# Guesses ------------------------------------------------------------------------------------------------------


def guess_of(kind: str, right: list[int]) -> list[int]:
    """A guess at the completion `right`: as it is, half of it, wrong in the middle, too long, wrong, none."""
    kinds = {
        "right": right,
        "half": right[: len(right) // 2],
        "wrong in the middle": [*right[:3], right[3] ^ 1, *right[4:]],
        "wrong twice": [right[0] ^ 1, *right[1:5], right[5] ^ 1, *right[6:]],
        "too long": [*right, *right],
        "wrong": token_ids(len(right), seed=99),
        "none": [],
    }
    return kinds[kind]


KINDS = ("right", "half", "wrong in the middle", "wrong twice", "too long", "wrong", "none")


def model_passes(model) -> list[tuple[int, ...]]:
    """The shape of the input of each pass through the whole model from now on; a prefill runs the backbone alone."""
    shapes = []
    model.register_forward_hook(
        lambda _module, _arguments, options, _output: shapes.append(tuple(options["input_ids"].shape)), with_kwargs=True
    )
    return shapes


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("architecture", ARCHITECTURE_NAMES)
def test_greedy_is_greedy_whatever_is_guessed(architecture, kind):
    model, config = random_policy(architecture), generation(**GREEDY)
    prompts = [token_ids(20) + ending for ending in PROMPTS]
    alone = [generated_alone(model, prompt, config) for prompt in prompts]
    guesses = [guess_of(kind if i else "right", completion) for i, completion in enumerate(alone)]
    found = sample_completions(model, prompts, config, GROUP, guesses=guesses)
    assert found == [c for c in alone for _ in range(GROUP)]


@pytest.mark.parametrize("at_once", [1, 2**12])
def test_a_pass_looks_at_a_few_rows_at_a_time(at_once, monkeypatch):
    model, config = random_policy("gemma3"), generation(**GREEDY)
    alone = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    monkeypatch.setattr(prompt_cache, "SCORES_AT_ONCE", at_once)
    guesses = [guess_of("half", completion) for completion in alone]
    assert sample_completions(model, PROMPTS, config, GROUP, guesses=guesses) == [
        c for c in alone for _ in range(GROUP)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_guessed_has_no_part_in_what_is_sampled(kind):
    model, config = random_policy("llama"), generation()

    def draw(guesses):
        torch.manual_seed(0)
        return sample_completions(model, PROMPTS, config, GROUP, guesses=guesses)

    expected = draw([[] for _ in PROMPTS])
    assert len({tuple(completion) for completion in expected}) == len(PROMPTS) * GROUP
    # The first of a group is guessed right; the others leave it where they differ from it.
    assert draw([guess_of(kind, expected[i * GROUP]) for i in range(len(PROMPTS))]) == expected


def test_right_guesses_take_one_pass_and_bad_ones_hardly_more_than_none(monkeypatch):
    monkeypatch.setattr(sampling, "GUESSED_AGAIN", 0)  # what these write repeats itself
    model, config = random_policy("llama"), generation(**GREEDY)
    alone = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    shapes = model_passes(model)
    sample_completions(model, PROMPTS, config, GROUP, guesses=alone)
    assert shapes == [(4, 8)]  # completions of a group that are equal so far share a row
    shapes.clear()
    sample_completions(model, PROMPTS, config, guesses=[guess_of("wrong", completion) for completion in alone])
    assert shapes == [(4, 8), (4, 7)] + [(4, 1)] * 6
    shapes.clear()
    sample_completions(model, PROMPTS, config, guesses=[guess_of("wrong in the middle", c) for c in alone])
    assert shapes == [(4, 8), (4, 4)]


def test_a_guess_is_taken_up_again_where_it_says_the_same():
    guess = (1, 2, 3, 4, 5, 6, 7, 8)

    def next_of(guess, completion, others=(), again=8):
        return sampling._Drafts([guess, *others]).next(guess, completion, again)

    assert next_of(guess, []) == guess
    assert next_of(guess, [1, 2]) == guess[2:]
    assert next_of(guess, [1, 9]) == guess[2:], "one word for another"
    assert next_of(guess, [1, 9, 9]) == (), "bad guesses cost no more than none"
    assert next_of(guess, [9, 9, 2, 3]) == guess[3:], "two words too many"
    assert next_of((1, 2, 5, 1, 2, 6, 1, 2, 7), [9, 9, 9, 1, 2]) == (6, 1, 2, 7), "the nearest place"
    assert next_of((1, 2, 5, 4, 1, 2, 6), [9, 9, 4, 1, 2]) == (6,), "more tokens that are the same"
    assert next_of(guess, [*guess, 9, 9]) == ()
    assert next_of(guess, [9, 9, 10, 11, 9, 12, 9, 10]) == (11, 9, 12, 9, 10, 11, 9, 12), "what is written"
    assert next_of(guess, [9, 2, 3, 11, 2, 3]) == guess[3:], "the guess comes before it"
    assert next_of(guess, [9, 2, 3, 11, 9, 2, 3]) == (11, 9, 2, 3) * 2, "but more tokens before that"
    other = (1, 2, 3, 9, 5, 6, 10, 11)
    assert next_of(guess, [1, 2, 3, 9, 5, 6], [other]) == (10, 11), "another's guess has more of them"
    assert next_of(guess, [9, 9, 2, 3], [other]) == guess[3:], "or else the guess comes first"
    assert next_of((), [9, 2, 3, 11, 9, 2, 3], [other]) == (), "who has no guess is given none"
    assert next_of(guess, [9, 9, 2, 3], again=2) == (4, 5)
    assert next_of(guess, [9, 9, 2, 3], again=0) == ()
    assert next_of(guess, [9, 9, 10, 11, 10, 11, 10]) == (11, 10) * 4, "round and round"


@pytest.mark.parametrize(("rows", "then"), [(1, [(1, 4)]), (4, [(4, 2), (4, 2)])])
def test_the_rows_of_a_pass_share_what_is_guessed_again(rows, then, monkeypatch):
    monkeypatch.setattr(sampling, "GUESSED_AGAIN", 4)
    model, config = random_policy("llama"), generation(**GREEDY)
    alone = generated_alone(model, PROMPTS[0], config)
    others = [token for token in range(3, model.config.vocab_size) if token not in alone][:2]
    shapes = model_passes(model)
    guesses = [[*others, *alone[2:]]] * rows
    assert sample_completions(model, PROMPTS[:1] * rows, config, guesses=guesses) == [alone] * rows
    assert shapes == [(rows, 8), (rows, 7), (rows, 1), (rows, 1), *then]


def test_where_guesses_come_true_again_more_is_guessed(monkeypatch):
    monkeypatch.setattr(sampling, "GUESSED_AGAIN", 4)
    model, config = random_policy("llama"), generation(**GREEDY, max_new_tokens=24)
    alone = generated_alone(model, PROMPTS[0], config)
    others = [token for token in range(3, model.config.vocab_size) if token not in alone][:2]
    shapes = model_passes(model)
    guesses = [[*others, *alone[2:]]] * 4
    assert sample_completions(model, PROMPTS[:1] * 4, config, guesses=guesses) == [alone] * 4
    assert shapes[4:] == [(4, 2), (4, 3), (4, 5), (4, 9), (4, 1)]


def test_a_right_guess_goes_on_beside_a_wrong_one():
    model, config = random_policy("llama"), generation(**GREEDY)
    alone = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    shapes = model_passes(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "GUESSED_PER_PASS", 3)
        patch.setattr(sampling, "GUESSED_AGAIN", 0)
        guesses = [alone[0], *(guess_of("wrong", completion) for completion in alone[1:])]
        sample_completions(model, PROMPTS, config, guesses=guesses)
    assert shapes == [(4, 4), (4, 4)] + [(3, 1)] * 6


@pytest.mark.parametrize("limit", ["LOGITS_PER_PASS", "GUESSED_PER_PASS"])
def test_a_guess_is_no_longer_than_one_pass_allows(monkeypatch, limit):
    model, config = random_policy("llama"), generation(**GREEDY)
    alone = [generated_alone(model, prompt, config) for prompt in PROMPTS]
    monkeypatch.setattr(sampling, limit, {"LOGITS_PER_PASS": 3 * 4 * model.config.vocab_size}.get(limit, 2))
    shapes = model_passes(model)
    assert sample_completions(model, PROMPTS, config, guesses=alone) == alone
    assert shapes == [(4, 3), (4, 3), (4, 2)]


@pytest.mark.parametrize("kind", ["right", "too long", "wrong in the middle"])
def test_an_end_token_ends_a_guessed_completion(kind):
    model = random_policy("llama")
    free = [generated_alone(model, prompt, generation(**GREEDY)) for prompt in PROMPTS]
    config = generation(**GREEDY, eos_token_id=[free[0][2], free[1][0]])
    expected = sample_completions(model, PROMPTS, config)
    found = sample_completions(model, PROMPTS, config, guesses=[guess_of(kind, completion) for completion in free])
    assert found == expected
    assert [len(completion) for completion in found][:2] == [3, 1]


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"suppress_tokens": [5]}])
def test_guesses_make_way_for_other_options(options):
    model = random_policy("llama")

    def draw(guesses):
        torch.manual_seed(0)
        return sample_completions(model, PROMPTS, generation(**options), GROUP, guesses=guesses)

    shapes = model_passes(model)
    assert draw([token_ids(8)] * len(PROMPTS)) == draw(None)
    assert {length for _, length in shapes} == {1, max(map(len, PROMPTS))}  # the prompts, then a token at a time


# Options that make sampling deterministic, or forbid what plain sampling does.
@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"temperature": 1e-4}])
def test_sampling_options_that_leave_the_best_token_only(options):
    model = random_policy("llama")
    greedy = sample_completions(model, PROMPTS, generation(**GREEDY), GROUP)
    torch.manual_seed(0)
    assert sample_completions(model, PROMPTS, generation(**options), GROUP) == greedy
    assert sample_completions(model, PROMPTS, generation(), GROUP) != greedy


def test_repetition_penalty_counts_the_prompt_too():
    model = random_policy("llama")
    config = generation(**GREEDY, repetition_penalty=50.0)
    found = sample_completions(model, PROMPTS, config)
    assert found == [generated_alone(model, prompt, config) for prompt in PROMPTS]
    assert found != sample_completions(model, PROMPTS, generation(**GREEDY))
    for prompt, completion in zip(PROMPTS, found, strict=True):
        assert len({*prompt, *completion}) == len({*prompt}) + len(completion)  # nothing comes back


# What a checkpoint ships with must not change what the caller asked for (Qwen2.5-Instruct: 1.1, 0.8, 20, 0.7).
@pytest.mark.parametrize("shipped", [{"repetition_penalty": 50.0}, {"top_k": 1, "top_p": 0.1}, {"min_p": 1.0}])
@pytest.mark.parametrize("asked", [{}, GREEDY])
def test_options_that_the_checkpoint_ships_with_do_not_count(shipped, asked):
    model = random_policy("llama")

    def draw():
        torch.manual_seed(0)
        return sample_completions(model, PROMPTS, generation(**asked), GROUP)

    model.generation_config = GenerationConfig()
    expected = draw()
    model.generation_config = GenerationConfig(**shipped)
    assert draw() == expected
    assert model.generation_config == GenerationConfig(**shipped)  # and they are still there afterwards


def test_same_seed_same_samples():
    model = random_policy("llama")

    def draw(seed):
        torch.manual_seed(seed)
        return sample_completions(model, PROMPTS, generation(), GROUP)

    assert draw(1) == draw(1)
    assert draw(1) != draw(2)
    assert len({tuple(completion) for completion in draw(1)}) == len(PROMPTS) * GROUP


@pytest.mark.parametrize("architecture", ["llama", "gemma3"])
def test_an_adapter_counts_and_the_mode_is_kept(architecture):
    base = random_policy(architecture)
    adapted = add_random_adapter(copy.deepcopy(base))
    fill_adapter(adapted, 0.2)
    config = generation(**GREEDY)
    adapted.train()
    found = sample_completions(adapted, PROMPTS, config)
    assert adapted.training
    adapted.eval()
    assert found == [generated_alone(adapted, prompt, config) for prompt in PROMPTS]
    assert not adapted.training
    assert found != sample_completions(base, PROMPTS, config)

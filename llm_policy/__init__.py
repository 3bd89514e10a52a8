"""How language models become policies: the library behind the scripts in the repository's root."""

import warnings

# Deprecations between the pinned libraries: nothing that a user could act on. Here, so that benchmarks and notebooks
# are as quiet as the scripts.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\b")

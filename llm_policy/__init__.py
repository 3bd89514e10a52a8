"""How language models become policies: the library behind the scripts in the repository's root."""

import logging
import warnings

# Deprecations between the pinned libraries: nothing that a user could act on. Here, so that benchmarks and notebooks
# are as quiet as the scripts.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\b")
# No vocabulary is changed here, which is what PEFT assumes, too, where a base model is a GGUF file or the hub is away.
warnings.filterwarnings("ignore", message="Could not find a config file in ")
# Where bitsandbytes is installed, peft imports it, and it says at each start that it lacks an optional package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

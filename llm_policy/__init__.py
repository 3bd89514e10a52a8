"""How language models become policies: the library behind the scripts in the repository's root."""

import logging
import warnings

# Deprecations between the pinned libraries: nothing that a user could act on. Here, so that benchmarks and notebooks
# are as quiet as the scripts.
warnings.filterwarnings("ignore", category=FutureWarning, module=r"(transformers|trl|peft|torch)\b")
# Where bitsandbytes is installed, peft imports it, and it says at each start that it lacks an optional package.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)

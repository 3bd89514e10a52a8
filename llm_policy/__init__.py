"""How language models become policies: the library behind the scripts in the repository's root."""

"""`python -m gguf_tools`."""

from gguf_tools.cli import main

main()

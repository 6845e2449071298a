"""``python -m xcompat``, the form that ``accelerate launch -m`` needs."""

from xcompat.cli import main

main()

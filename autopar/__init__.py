"""autopar plans and runs parallel training of PyTorch transformers."""

__version__ = "0.1.0"

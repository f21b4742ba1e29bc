"""DeepSeek-V4 (2026): a sparse mixture-of-experts decoder with compressed attention, ragged.

Start with `model.py`: a whole pass on one screen. `config.py` says what a model looks like,
`passes.py` which rows of which table a pass reads and writes, `hyper.py`, `attention.py`,
`compressor.py` and `moe.py` are the parts of a layer, `arithmetic.py` how a matrix is multiplied.
Every part is written in PyTorch's operations; for passes of few rows and for int8, `glue.c` and
`attention.h` compute the same in one call a sublayer (`kernels.py`).
"""

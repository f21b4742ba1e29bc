"""Training DeepSeek-V4: the tower from nothing, and the drafters that a checkpoint carries.

The tower that serves (`models/deepseek_v4/`) is ragged, keeps its state by position and knows no
gradient. Here are the same formulas once more for training, over whole documents and with autograd;
the tests hold the two equal, logits and drafts alike. Weights have the official names throughout,
so what is trained here is an ordinary checkpoint.

    operations.py   the few operations that autograd alone would make slow
    layers.py       one block: mixing of streams, attention;  experts.py  its experts
    tower.py        all of them: tokens to hidden states
    heads.py        MTP-1 and the DSpark stages, on a frozen tower
    muon.py         updates of matrices
    vocabulary.py   a tokenizer with V4's marks
    batches.py      documents of like length together, resumable
    loop.py         steps, states, validation: one loop for all three
    pretrain.py     a tower and its tokenizer from a file;  drafter.py  a drafter on a tower
    checkpoint.py   the official layout on disk
"""

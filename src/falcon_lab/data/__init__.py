"""Training data: corpora, chats, packing, loss masks and the data module."""

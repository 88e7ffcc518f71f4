"""Files with what was measured: their format, and looking after folders of them."""

"""The model in plain torch: one file per block of the paper."""

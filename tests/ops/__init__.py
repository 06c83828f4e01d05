"""Tests of the operators, one file each; the inputs are in ``cases``, the common promises in ``contract``."""

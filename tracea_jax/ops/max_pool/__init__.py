"""Maxima of windows of images, as of max pooling, and their derivatives."""

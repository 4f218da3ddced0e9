"""The transport over gloo, between hosts too."""

"""Models in the format of Hugging Face: read under any layout, written so that transformers loads them."""

"""The tiny models of the Try it workflow, made of seeds and one small file."""

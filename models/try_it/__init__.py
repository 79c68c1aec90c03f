"""The tiny models of the Try it workflow, made from seeds and one small file."""

"""Check of a folder of pictures before training: near-doubles, blur, size, borders, colours and captions."""

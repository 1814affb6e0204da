"""Two containers prove to each other how bytes travel between them: what `doctor` runs inside.

    serve     one end: exports records when it is told to, and offers them in every way
    measure   the other end: fetches them, verifies each byte, prints what it found as JSON
    look      what a container sees of its arenas and itself
    sweep     removes what the ends left in arenas that others go on using

Each takes one argument, a JSON object.  No part of a shard imports this.
"""

"""Tasks of users' own: an object in a file, or plain torch modules, which lanes go through one after the other."""

"""One deployment on this machine: `up` starts it, its state folder knows it, `down` stops it."""

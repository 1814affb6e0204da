"""How a TGI server is started with the overlay."""

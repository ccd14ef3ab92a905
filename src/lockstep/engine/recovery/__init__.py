"""What ranks do when some of them are lost or new ones come."""

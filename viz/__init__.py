"""Pictures and tables made from plans."""

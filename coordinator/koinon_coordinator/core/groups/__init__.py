"""Groups of consumers: which member owns which partition. Pure."""

"""How fast, beside the reference and the peers; what it costs in memory."""

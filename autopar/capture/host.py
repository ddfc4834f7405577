"""Where values live that no rank computes with: masters before they are sharded, constants."""

HOST = "cpu"

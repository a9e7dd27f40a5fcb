"""The gateway: from an OpenAI request to a replica that holds its Cartridges."""

"""What the present machine attains, measured: products, attention, memory, collectives."""

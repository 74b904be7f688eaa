"""The broker: owns every task from submit to consumed, in a durable journal."""

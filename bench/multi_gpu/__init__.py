"""Benchmarks of several GPUs of one host."""

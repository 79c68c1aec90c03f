"""TITLE lora"""

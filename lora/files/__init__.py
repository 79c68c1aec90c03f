"""TITLE lora/files"""

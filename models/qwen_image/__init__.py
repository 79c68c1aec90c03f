"""TITLE models/qwen_image"""

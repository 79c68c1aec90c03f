"""TITLE compile/tune"""

"""TITLE common"""

"""TITLE nodes/loras"""

"""TITLE models/layers"""

"""TITLE data"""

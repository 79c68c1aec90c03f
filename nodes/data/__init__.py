"""TITLE nodes/data"""

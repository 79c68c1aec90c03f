"""TITLE compile/report"""

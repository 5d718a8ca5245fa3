"""Run → plain data for each tab: no Dash, no plotly. Asserted on in the tests."""

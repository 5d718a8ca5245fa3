"""Plain data → plotly figure (a dict). Pure: no Dash, no log; shared by the app and the static report."""

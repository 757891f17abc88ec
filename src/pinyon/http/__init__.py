"""An HTTP/1.1 server that knows no model, no tenant and no route."""

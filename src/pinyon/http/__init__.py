"""An HTTP/1.1 server. It knows no model, no tenant and no route."""

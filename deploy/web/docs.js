// Swagger UI on what the gateway says of itself. No validator badge: that would ask somebody else.
SwaggerUIBundle({ url: "openapi.json", dom_id: "#api", deepLinking: true, validatorUrl: null });

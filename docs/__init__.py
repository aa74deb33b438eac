"""The documentation: pages in Markdown, and in site_build what makes a site of them."""

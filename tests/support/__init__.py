"""What tests share, in folders by what it is: CONTRIBUTING.md says which."""

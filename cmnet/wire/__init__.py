"""What goes over real sockets: frames and control messages (pure), the mesh that carries them."""

"""What a run trains from: its model, its critic, demonstrations; settings that do not fit them."""

"""What runs in the next step: sequences, policies, batches. Nothing here touches a tensor."""

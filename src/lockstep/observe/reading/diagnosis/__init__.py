"""Why a run is slow, or has ended: causes by what they cost, each with what it was seen by."""

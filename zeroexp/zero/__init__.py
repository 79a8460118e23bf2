"""The ZeRO runtime: units that are gathered, reduced and released, whatever the stage."""

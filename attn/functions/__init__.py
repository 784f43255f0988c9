"""A caller's own scores and masks: functions of UOps, traced once, then evaluated, differentiated and bounded as any expression of UOps is."""

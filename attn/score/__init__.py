"""Changes of the scores between Q K^T and the softmax: first the score terms (softcap, ALiBi, bias, score_mod), then the masks. Each term is a row of
the table in attn/score/terms.py, each mask a row of the table in attn/score/masks.py. The rest of attn knows terms and masks only by these rows."""
